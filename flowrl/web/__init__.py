"""`flowrl ui`: a page that shows run folders, and stops and resumes runs."""
