from manyhands.cloud.plan import Experiment, Group, Role, groups_of

__all__ = ["Experiment", "Group", "Role", "groups_of"]
