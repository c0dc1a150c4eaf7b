"""The page of the web console: HTML, CSS and JavaScript modules, which browsers load without a build step."""
