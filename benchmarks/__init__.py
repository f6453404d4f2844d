"""Side-by-side measurements against other fine-tuning loops."""
