"""How steps are drawn: colours of tasks, for figures, report and playground; ``timeline.js``, for the pages of both."""
