"""Other tools' files as run files: ``anygauge import``.

- `draft`: what each key becomes, and the run file that grows from it.
- `axolotl`, `trainer`, `llamafactory`, `habana`: a table for each tool.
- `engine_files`: DeepSpeed's JSON, and FSDP as Accelerate and Trainer write it.
- `detect`: which tool's file it is; `run_text`: the run file as commented text.
"""
