"""Arms compared under load, in blocks; answers compared; acceptance counted."""
