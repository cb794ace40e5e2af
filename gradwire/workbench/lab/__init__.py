"""A cluster with slow links on one machine, and measurements of links."""
