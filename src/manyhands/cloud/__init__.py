from manyhands.cloud.experiment import Experiment, NoAccount

__all__ = ["Experiment", "NoAccount"]
