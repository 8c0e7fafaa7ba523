"""A report as one self-contained page; see `page.render`."""
