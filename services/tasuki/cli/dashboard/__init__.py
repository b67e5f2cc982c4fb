"""`tasuki dashboard`: a page that shows a node and its run. It only reads."""
