"""What rewards with a network share: loading, preprocessing, CLIP, and how alike images are."""
