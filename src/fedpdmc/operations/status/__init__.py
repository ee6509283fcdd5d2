"""A run as its operator sees it while it goes on: facts, a page, metrics, and a word when nothing comes."""

from fedpdmc.operations.status.board import CoordinatorBoard, SiteBoard
from fedpdmc.operations.status.watch import Watching, watched

__all__ = ["CoordinatorBoard", "SiteBoard", "Watching", "watched"]
