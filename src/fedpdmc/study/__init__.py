"""A study: the contract that coordinator and sites hold, a site's policy, and its records read as the contract says."""

from fedpdmc.study.contract import Study, parse_study, read_study
from fedpdmc.study.formula import Design
from fedpdmc.study.policy import Policy, read_policy
from fedpdmc.study.read_data import read_records
from fedpdmc.study.schema import Column

__all__ = ["Column", "Design", "Policy", "Study", "parse_study", "read_policy", "read_records", "read_study"]
