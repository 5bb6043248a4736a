"""Set up a virtual environment with what the tests need, and run them.

    python3 tests/run.py [PYTEST OPTIONS]

Needs Python 3.11 or newer and nothing else. In an active environment its own packages are completed and taken; else
`.venv` is made. A second run takes the same one.
"""

import os
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

from quickstart import ENVIRONMENT, ROOT, make_environment

folder = Path(os.environ.get("VIRTUAL_ENV", ENVIRONMENT))
programs = make_environment(folder, ["test"])
sys.exit(subprocess.run([programs / "python", "-m", "pytest", *sys.argv[1:]], cwd=ROOT).returncode)
