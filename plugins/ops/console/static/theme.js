// Set the theme that was chosen before the page is drawn; without one, the system's.
(() => {
  try {
    const theme = localStorage.getItem("modelyard-theme");
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch {
    // A browser that keeps nothing has the system's theme.
  }
})();
