// The text of a PDF, by a library that is loaded with the first one. It runs in the page: the policy allows no workers.

const PROTECTED = "PasswordException";

/**
 * @param {ArrayBuffer} data
 * @returns {Promise<string>} its pages, with an empty line between them
 * @throws {Error} whose message says why there is no text
 */
export async function textOfPdf(data) {
  const [library] = await Promise.all([import("./vendor/pdf.js"), import("./vendor/pdf.worker.js")]).catch(() => {
    throw new Error("what reads PDFs could not be loaded");
  });
  const task = library.getDocument({ data, verbosity: 0, isEvalSupported: false, useWasm: false, disableFontFace: true });
  try {
    const pdf = await task.promise;
    const pages = [];
    for (let number = 1; number <= pdf.numPages; number++) {
      const page = await pdf.getPage(number);
      const { items } = await page.getTextContent();
      pages.push(items.map(({ str = "", hasEOL }) => (hasEOL ? `${str}\n` : str)).join("").trim());
      page.cleanup();
    }
    const text = pages.join("\n\n").trim();
    if (text) return text;
  } catch (error) {
    throw new Error(error.name === PROTECTED ? "it is protected by a password" : "it is damaged, or no PDF");
  } finally {
    task.destroy();
  }
  throw new Error("it holds no text; is it a scan?");
}
