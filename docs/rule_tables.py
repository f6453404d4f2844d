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

This page lists the variables that each backend sets for its ranks before they import torch. A
variable that you, the run file or a site's hook set wins over the backend's rule
([who sets what](backends.md#environment-who-sets-what)); a backend may refuse a value that
contradicts the run. To see what a job would get on this machine, and why a rule does not apply:

```sh run
anygauge env --backend {HOST_DEVICE} --devices 2 --explain
```

A rule reads the job, the node and the run file's `backend_options`. Its scope says where the value
is the same: in the whole job, on one node, or in one rank. To write this page from the code:
`python docs/rule_tables.py docs/environment.md`.
"""


def page(backends: Sequence[Backend]) -> str:
    """The whole page."""
    parts = [HEAD]
    for backend in backends:
        parts.append(f"\n## `{backend.name}`\n\n")
        if backend.fabrics:
            parts.append(
                "Networks between machines (`launch.fabric`), best first. `auto` takes the first "
                "that it\ndetects; if it detects none, the library chooses:\n\n"
            )
            parts.append("| fabric | what | detected by `auto` |\n|---|---|---|\n")
            parts += [
                f"| `{f.name}` | {f.what} | {'yes' if f.detect else 'no'} |\n"
                for f in backend.fabrics
            ]
            parts.append("\n")
        parts.append("| variable | value | scope | why | source |\n|---|---|---|---|---|\n")
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
