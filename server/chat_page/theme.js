// Before the first paint, so that a chosen theme does not flash: the one script that is no module.
try {
  document.documentElement.dataset.theme = localStorage.getItem("weft:theme") ?? "auto";
} catch { /* this browser keeps nothing: the theme is that of the system */ }
