"""The catalogue of machines, and what a stage may ask of one."""
