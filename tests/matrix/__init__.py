"""What runs where: every kind of work in every place that trains, killed or not."""
