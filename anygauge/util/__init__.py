"""What every layer may use: files, processes, events, errors; imports nothing else of anygauge."""
