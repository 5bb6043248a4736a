"""Check that every option of every command is in its section of the built command-line page.

python .ci/documented_options.py SITE_FOLDER
"""

from __future__ import annotations

import html
import re
import sys
from pathlib import Path

from wisparse.cli import VERBS, load_verb

page = Path(sys.argv[1], "cli", "index.html").read_text("utf-8")
sections = re.split(r'<h2 id="wisparse-([\w-]+)"', page)
text = {
    name: html.unescape(re.sub(r"<[^>]+>", "", body)) for name, body in zip(sections[1::2], sections[2::2], strict=True)
}
missing = [
    f"wisparse {verb} {option}"
    for verb in VERBS
    for parameter in load_verb(verb).params
    for option in (*parameter.opts, *parameter.secondary_opts)
    if option.startswith("-") and not re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", text.get(verb, ""))
]
if missing:
    sys.exit(f"docs/cli.md: not in the built page: {', '.join(missing)}")
