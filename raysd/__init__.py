"""raysd makes a target model decode faster with a trained draft, and measures that it does. See README.md."""

__version__ = "0.1.0"
