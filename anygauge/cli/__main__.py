"""``python -m anygauge.cli``: the same as the command ``anygauge``."""

from anygauge.cli import main

main()
