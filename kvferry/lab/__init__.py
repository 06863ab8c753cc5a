"""Several hosts out of one machine: nodes, and links with a rate, a delay and faults on demand."""
