"""Files of requests that are answered when there is room: jobs, who works on them, who is told of their end."""
