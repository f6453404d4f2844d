"""The kernels of a run: chosen, planned, and put into the model.

- `choose` asks the run file, the backend and what is installed; it needs no torch.
- `plan` looks at the model's configuration, and once at the model without weights: its one
  `KernelPlan` says what computes each operation, and why, before anything is built.
- `attention`, `install`, `rope`, `logits_rule` and `loss` know models: what a kernel can serve, and
  how it gets in.
"""
