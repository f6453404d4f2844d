"""The documentation's tables of environment rules, made from the backends' own.

``python docs/rule_tables.py docs/environment.md`` writes the page anew.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from anygauge.interface import HOST_DEVICE, Backend
from anygauge.registry import Registry
from anygauge.util.files import write_text

HEAD = f"""# Environment

What each backend sets for its ranks before torch is imported, made from the code by
`python docs/rule_tables.py docs/environment.md`. A rule reads the job, the node and
the run file's `backend_options`; a variable that you, the run file or a site's hook set wins over
it, and is shown as such ([who sets what](backends.md#environment-who-sets-what)). What a job would
get here, and why a rule does not apply:

```sh run
anygauge env --backend {HOST_DEVICE} --devices 2 --explain
```
"""


def page(backends: Sequence[Backend]) -> str:
    """The whole page."""
    parts = [HEAD]
    for backend in backends:
        parts.append(f"\n## `{backend.name}`\n\n")
        if backend.fabrics:
            parts.append("Networks between machines (`launch.fabric`), best first:\n\n")
            parts.append("| fabric | what | found by itself |\n|---|---|---|\n")
            parts += [
                f"| `{f.name}` | {f.what} | {'yes' if f.detect else 'no'} |\n"
                for f in backend.fabrics
            ]
            parts.append("\n")
        parts.append("| variable | value | same in each | why | source |\n|---|---|---|---|---|\n")
        parts += [
            f"| `{r.name}` | {r.value} | {r.scope.value} | {r.reason} | {r.source} |\n"
            for r in backend.environment_rules
        ]
    return "".join(parts)


def shipped() -> list[Backend]:
    """The backends of this distribution, by name."""
    registry = Registry.load()
    names = sorted(p.spec.name for p in registry.backends if p.distribution == "anygauge")
    return [registry.create_backend(name) for name in names]


if __name__ == "__main__":
    write_text(Path(sys.argv[1]), page(shipped()))
