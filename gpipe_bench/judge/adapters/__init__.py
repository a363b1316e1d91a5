"""The engines that the judge knows, a file each; a file of a user's is the same: ``adapter(schedule)`` gives one."""
