"""Tools that keep the repository in order: set-up, the lock, the checks. No part of the package."""
