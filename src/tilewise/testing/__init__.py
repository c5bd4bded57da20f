"""The judge: problems, the error budget and the verdict, shipped so that anyone can run them on any backend."""

from .judge import Verdict, judge
from .problems import Problem, problems

__all__ = ["Problem", "Verdict", "judge", "problems"]
