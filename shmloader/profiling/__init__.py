"""The profile of a loader: where its time goes, batch by batch. Loading never imports this package."""

from shmloader.profiling.profile import Profile
from shmloader.profiling.report import ProfileReport

__all__ = ["Profile", "ProfileReport"]
