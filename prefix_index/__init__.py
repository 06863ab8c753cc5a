"""Who holds which prefix: workers announce their blocks, routers look them up."""
