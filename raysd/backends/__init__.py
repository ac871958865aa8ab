"""The only folder that imports Ray or vLLM."""
