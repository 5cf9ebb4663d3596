// Sets the theme before the first paint, so that no other theme flashes; therefore not a module.
try {
  document.documentElement.dataset.theme = localStorage.getItem("weft:theme") ?? "auto";
} catch { /* storage is blocked: the theme follows the system */ }
