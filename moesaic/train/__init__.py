"""The trainer: one loop for every objective, its optimizers and schedules, and the law of its loss curves."""
