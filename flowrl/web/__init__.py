"""`flowrl ui`: a page that shows run folders, and stops, resumes and starts runs."""
