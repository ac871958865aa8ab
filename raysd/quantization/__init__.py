"""The draft in FP8: scheme, exclusions as vLLM reads them, audit of the written file."""
