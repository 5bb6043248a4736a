"""A block's operations: each reads what an earlier one wrote, and together they run every projection and use every norm."""

from dataclasses import replace
from pathlib import Path

import pytest
from runtime_models import EXPERTS, HYBRIDS, SMALL, VARIANTS, make_checkpoint

from wisparse.converter.config import full_config
from wisparse.formats.block_ops import HIDDEN, Experts, Linear, Norm, block_ops, describe
from wisparse.formats.checkpoint import Checkpoint


@pytest.mark.parametrize("variant", [*VARIANTS, *HYBRIDS, *SMALL, *EXPERTS])
def test_operations_are_complete_and_in_order(variant: str, tmp_path: Path) -> None:
    config = Checkpoint.open(make_checkpoint(variant, tmp_path / "source"), complete=full_config).config
    for index in range(config.num_blocks):
        ops, written = block_ops(config, index), {HIDDEN}
        for op in ops:
            assert written.issuperset(op.inputs), op
            written.add(op.output)
        assert ops[-1].output == HIDDEN
        projections = [one for op in ops if isinstance(op, Linear | Experts) for one in op.projections]
        assert projections == list(config.projections(index))
        norms = {op.weight for op in ops if isinstance(op, Norm)}
        stored = replace(config.norms, outputs_key=None)
        spec = config.blocks[index]
        has = {"attention": spec.mixer is not None, "mlp": spec.has_mlp}
        assert norms >= {name for name, one in vars(stored).items() if one is not None and has[name.partition("_")[0]]}
    assert sum(line.startswith("blocks ") for line in describe(config)) <= config.num_blocks
