"""`lmworks learn serve`: the course as local HTML pages."""
