// Runs before the page is drawn, so that a chosen theme does not flash.
(() => {
  const kept = localStorage.getItem("manyhands theme");
  if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
})();
