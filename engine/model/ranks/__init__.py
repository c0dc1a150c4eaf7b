"""What the ranks of one model need to know of each other: which part each one has, and the operations in which all take
part. The processes are in `parallel`. Imports `spec` and `weights`."""
