"""Other tools' files as run files: ``anygauge import``.

- `tables`: for each tool, what each of its keys is here; `draft`: the run file that grows by them.
- `axolotl`, `trainer`, `llamafactory`, `habana`: what takes more than one key to say.
- `engine_files`: DeepSpeed's JSON, and FSDP as Accelerate and Trainer write it;
  `detect`: which tool a file is of.
"""
