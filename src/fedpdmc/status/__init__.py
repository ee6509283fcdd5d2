"""A run as its operator sees it while it goes on: facts, a page, metrics, and a word when nothing comes."""

from fedpdmc.status.board import CoordinatorBoard, SiteBoard
from fedpdmc.status.watch import Watching, watched

__all__ = ["CoordinatorBoard", "SiteBoard", "Watching", "watched"]
