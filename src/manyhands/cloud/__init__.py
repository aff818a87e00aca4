from manyhands.cloud.plan import Experiment, MachineGroup, MachineRole, groups_of

__all__ = ["Experiment", "MachineGroup", "MachineRole", "groups_of"]
