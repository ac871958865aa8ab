"""What a user writes: one YAML file, typed section by section."""

from raysd.experiment.experiment import Experiment
from raysd.experiment.loader import dump_experiment, load_experiment

__all__ = ["Experiment", "dump_experiment", "load_experiment"]
