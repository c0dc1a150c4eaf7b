"""Trains learned routers, for the command `loralane route train`. scikit-learn is imported only to fit one."""
