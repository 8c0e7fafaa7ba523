"""litellm, llama-index and aisuite against Baton: a question and its answer, whole and streamed."""

import os

import aisuite
import litellm
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

url, model = os.environ["BATON_URL"] + "/v1", os.environ["MODEL"]
messages = [{"role": "user", "content": "Say hello."}]

ask = {"model": f"openai/{model}", "messages": messages, "api_base": url, "api_key": "none", "max_tokens": 20}
print("litellm", litellm.completion(**ask).choices[0].message.content)
print("litellm", len(list(litellm.completion(**ask, stream=True))), "pieces")

llm = OpenAILike(model=model, api_base=url, api_key="none", is_chat_model=True, max_tokens=20)
print("llama-index", llm.chat([ChatMessage(role="user", content="Say hello.")]).message.content)
print("llama-index", len(list(llm.stream_complete("Say hello."))), "pieces")

client = aisuite.Client({"openai": {"base_url": url, "api_key": "none"}})
answer = client.chat.completions.create(model=f"openai:{model}", messages=messages, max_tokens=20)
print("aisuite", answer.choices[0].message.content)
