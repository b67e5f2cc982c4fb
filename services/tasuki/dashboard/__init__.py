"""`tasuki dashboard`: a read-only web page that shows a node and its run."""
