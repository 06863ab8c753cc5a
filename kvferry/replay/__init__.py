"""What-if: a trace through the real router and index, with simulated workers in virtual time."""
