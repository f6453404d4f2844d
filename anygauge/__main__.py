"""``python -m anygauge``: the command ``anygauge``, for launchers that start a module."""

from anygauge.cli import main

if __name__ == "__main__":
    main()
