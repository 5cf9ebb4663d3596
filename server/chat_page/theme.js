// Before the first paint, so that a chosen theme does not flash: the one script that is no module.
document.documentElement.dataset.theme = localStorage.getItem("weft:theme") ?? "auto";
