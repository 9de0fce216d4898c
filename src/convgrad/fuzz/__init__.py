"""`convgrad fuzz`: random problems, called in random ways, judged by the oracle; what fails is made small."""
