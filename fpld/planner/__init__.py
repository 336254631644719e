"""The operator's planner: from links, a deadline and clip levels to bits, bytes, seconds and a bracket of the loss."""

from fpld.budget.limits import Sender
from fpld.planner.forecast import POLICIES, Forecast, forecast, least_total, shortest_deadline
from fpld.planner.inputs import PlanInputs

__all__ = ["POLICIES", "Forecast", "PlanInputs", "Sender", "forecast", "least_total", "shortest_deadline"]
