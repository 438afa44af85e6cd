"""Programs that nobody here wrote, unchanged: stock, and under ``python -m pyg_accel run``."""
