"""Frameworks for agents, each with its usual classes pointed at the demo: chats, streams, structured output, a forced
tool call with its result told back, embeddings where the library has them, and errors as the library's exceptions."""

import pytest
from pydantic import BaseModel

pytestmark = pytest.mark.asyncio(loop_scope="session")

KEY = "sk-demo-acme"
MODEL = "tools"
BRIEF = {"temperature": 0, "max_tokens": 48}


class City(BaseModel):
    name: str
    is_capital: bool


def weather(city: str) -> str:
    """Get the current weather in a city."""
    return f"It is 17 degrees in {city}."


class TestLlamaIndex:
    @pytest.fixture
    def llm(self, url):
        from llama_index.llms.openai_like import OpenAILike

        options = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 2048, "max_retries": 0}
        return OpenAILike(model=MODEL, api_base=url, api_key=KEY, **BRIEF, **options)

    @pytest.fixture
    def question(self):
        from llama_index.core.llms import ChatMessage

        return [ChatMessage(role="user", content="What is the capital of France?")]

    async def test_chat_and_stream(self, llm, question):
        whole = (await llm.achat(question)).message.content
        pieces = [piece.delta async for piece in await llm.astream_chat(question)]
        assert "".join(pieces) == whole
        assert len(pieces) > 3

    async def test_complete(self, url, llm):
        completions = type(llm)(model=MODEL, api_base=url, api_key=KEY, is_chat_model=False, **BRIEF)
        assert (await completions.acomplete("The capital of France is")).text
        assert [piece.delta async for piece in await completions.astream_complete("The capital of France is")]

    async def test_structured_output(self, llm, question):
        answer = await llm.as_structured_llm(City).achat(question)
        assert isinstance(answer.raw, City)

    async def test_a_tool_is_called_and_its_result_told(self, llm, question):
        from llama_index.core.llms import ChatMessage
        from llama_index.core.tools import FunctionTool

        tool = FunctionTool.from_defaults(weather)
        answer = await llm.achat_with_tools([tool], chat_history=question, tool_required=True)
        [call] = llm.get_tool_calls_from_response(answer)
        assert call.tool_name == "weather"
        result = tool(**call.tool_kwargs)
        told = ChatMessage(role="tool", content=str(result), additional_kwargs={"tool_call_id": call.tool_id})
        assert (await llm.achat([*question, answer.message, told])).message.content

    async def test_embeddings(self, url):
        from llama_index.embeddings.openai_like import OpenAILikeEmbedding

        model = OpenAILikeEmbedding(model_name="pirate", api_base=url, api_key=KEY, max_retries=0)
        [first, second] = await model.aget_text_embedding_batch(["one", "two"])
        assert len(first) == len(second) == len(await model.aget_query_embedding("one")) > 1

    async def test_errors(self, url, llm, question):
        import openai

        with pytest.raises(openai.NotFoundError):
            await type(llm)(model="unknown", api_base=url, api_key=KEY, is_chat_model=True).achat(question)
        with pytest.raises(openai.AuthenticationError):
            await type(llm)(model=MODEL, api_base=url, api_key="wrong", is_chat_model=True).achat(question)


@pytest.mark.parametrize("kind", ["OpenAIChatModel", "OpenAIResponsesModel"])
class TestPydanticAi:
    @pytest.fixture
    def model_of(self, url, kind):
        from pydantic_ai.models import openai
        from pydantic_ai.providers.openai import OpenAIProvider

        return lambda name=MODEL, key=KEY: getattr(openai, kind)(
            name, provider=OpenAIProvider(base_url=url, api_key=key)
        )

    async def test_chat_and_stream(self, model_of):
        from pydantic_ai import Agent

        agent = Agent(model_of(), model_settings=BRIEF, instructions="Be brief.")
        whole = await agent.run("What is the capital of France?")
        async with agent.run_stream("What is the capital of France?") as stream:
            pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
        assert "".join(pieces) == whole.output
        assert whole.usage.output_tokens > 0

    @pytest.mark.parametrize("way", ["NativeOutput", "ToolOutput"])
    async def test_structured_output(self, model_of, way):
        import pydantic_ai

        agent = pydantic_ai.Agent(model_of(), model_settings=BRIEF, output_type=getattr(pydantic_ai, way)(City))
        assert isinstance((await agent.run("What is the capital of France?")).output, City)

    async def test_a_tool_is_called_and_its_result_told(self, model_of):
        from pydantic_ai import Agent, UsageLimits

        agent = Agent(model_of(), model_settings=BRIEF, tools=[weather])
        result = await agent.run("What is the weather in Paris?", usage_limits=UsageLimits(request_limit=3))
        parts = [part.part_kind for message in result.all_messages() for part in message.parts]
        assert "tool-return" in parts and result.output

    async def test_errors(self, model_of):
        from pydantic_ai import Agent
        from pydantic_ai.exceptions import ModelHTTPError

        for name, key, status in (("unknown", KEY, 404), (MODEL, "wrong", 401)):
            with pytest.raises(ModelHTTPError) as caught:
                await Agent(model_of(name, key)).run("Hi")
            assert caught.value.status_code == status


async def test_pydantic_ai_embeddings(url):
    from pydantic_ai import Embedder
    from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIEmbeddingModel("pirate", provider=OpenAIProvider(base_url=url, api_key=KEY))
    vectors = (await Embedder(model).embed_documents(["one", "two"])).embeddings
    assert len(vectors) == 2 and len(vectors[0]) == len(vectors[1]) > 1


class TestInstructor:
    @pytest.fixture
    def client_of(self, url):
        import instructor
        from openai import AsyncOpenAI

        return lambda mode, key=KEY: instructor.from_openai(
            AsyncOpenAI(base_url=url, api_key=key, max_retries=0), mode=getattr(instructor.Mode, mode)
        )

    @pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"])
    async def test_structured_output(self, client_of, mode):
        asked = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
        city = await client_of(mode).create(model=MODEL, response_model=City, max_retries=0, **asked)
        assert isinstance(city, City)

    async def test_stream_of_partial_objects(self, client_of):
        asked = {"messages": [{"role": "user", "content": "What is the capital of France?"}], **BRIEF}
        parts = [part async for part in client_of("TOOLS").create_partial(model=MODEL, response_model=City, **asked)]
        assert City(**parts[-1].model_dump())

    async def test_errors(self, client_of):
        from instructor.core import InstructorRetryException
        from openai import AuthenticationError, NotFoundError

        for name, key, error in (("unknown", KEY, NotFoundError), (MODEL, "wrong", AuthenticationError)):
            with pytest.raises((error, InstructorRetryException)) as caught:
                await client_of("TOOLS", key).create(
                    model=name, response_model=City, max_retries=0, messages=[{"role": "user", "content": "Hi"}]
                )
            assert isinstance(caught.value, error) or error.__name__ in repr(caught.value.__cause__) + str(caught.value)


@pytest.mark.parametrize("kind", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
class TestOpenAiAgents:
    @pytest.fixture
    def agent_of(self, url, kind):
        import agents
        from openai import AsyncOpenAI

        agents.set_tracing_disabled(True)

        def make(name=MODEL, key=KEY, settings=None, **options):
            client = AsyncOpenAI(base_url=url, api_key=key, max_retries=0)
            model = getattr(agents, kind)(model=name, openai_client=client)
            chosen = agents.ModelSettings(**BRIEF, **(settings or {}))
            return agents.Agent(name="test", model=model, model_settings=chosen, **options)

        return make

    async def test_chat_and_stream(self, agent_of):
        from agents import Runner

        agent = agent_of(instructions="Be brief.")
        whole = await Runner.run(agent, "What is the capital of France?")
        stream = Runner.run_streamed(agent, "What is the capital of France?")
        deltas = [
            e.data.delta
            async for e in stream.stream_events()
            if getattr(e, "data", None) and e.data.type == "response.output_text.delta"
        ]
        assert "".join(deltas) == stream.final_output == whole.final_output

    async def test_structured_output(self, agent_of):
        from agents import Runner

        result = await Runner.run(agent_of(output_type=City), "What is the capital of France?")
        assert isinstance(result.final_output, City)

    async def test_a_tool_is_called_and_its_result_told(self, agent_of):
        """After a required call the library leaves the next one to the model."""
        from agents import Runner, function_tool

        agent = agent_of(tools=[function_tool(weather)], settings={"tool_choice": "required"})
        result = await Runner.run(agent, "What is the weather in Paris?", max_turns=3)
        assert [item.type for item in result.new_items][:2] == ["tool_call_item", "tool_call_output_item"]
        assert result.final_output

    async def test_errors(self, agent_of):
        import openai
        from agents import Runner

        with pytest.raises(openai.NotFoundError):
            await Runner.run(agent_of("unknown"), "Hi")
        with pytest.raises(openai.AuthenticationError):
            await Runner.run(agent_of(key="wrong"), "Hi")
